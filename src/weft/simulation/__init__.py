"""The execution model, and what it says of an order."""
