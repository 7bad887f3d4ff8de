"""What a graph module says of where it comes from, besides its nodes."""

ABOUT_KEY = "weft.about"
"""In `GraphModule.meta`: a dict that can be written as JSON, such as `{'source': 'trace log', 'rank': 0}`."""
