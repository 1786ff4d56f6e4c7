"""The protocol as a state machine, searched exhaustively within stated bounds, with the product's own rules."""
