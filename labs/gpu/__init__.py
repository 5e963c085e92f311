"""`make gpu`: what the GPU of this machine says to the course, in eight minutes."""
