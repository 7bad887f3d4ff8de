"""The time of operators and collectives on a described cluster. This package edits no graph and needs no device."""
