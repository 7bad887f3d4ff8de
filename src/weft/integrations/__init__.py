"""Adapters for training frameworks. Importing Weft imports none of them."""
