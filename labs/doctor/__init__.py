"""What holds your training back, and what would each cure give at most?"""
