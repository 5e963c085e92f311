"""Two machines out of one: places with an address each (`machines`), and the agents and ranks that run on them."""
