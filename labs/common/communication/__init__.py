"""The cost of communication between ranks: connections, collectives, overlap and compression."""
