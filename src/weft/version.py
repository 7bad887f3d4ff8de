"""The version of Weft, which is part of plans and cache keys. The package metadata is built from it."""

VERSION = "0.1.0"
