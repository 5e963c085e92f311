"""What communication between ranks costs: the wire, its collectives, and what hides or shrinks them."""
