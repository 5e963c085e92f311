"""`make gpu`: check this machine's GPU and record the course's launches on it, in eight minutes."""
