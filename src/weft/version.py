"""The version of Weft, which is part of plans and cache keys."""

VERSION = "0.1.0"
