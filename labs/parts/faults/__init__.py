"""What goes wrong in training on several devices: messages, what they mean, and drills that make each of them."""
