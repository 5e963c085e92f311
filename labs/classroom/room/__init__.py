"""The instructor's page of a room: what `labs.kit.room` kept there, read, compared and drawn."""
