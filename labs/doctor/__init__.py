"""Does a training script compute what it seems to, and what makes it slow?"""
