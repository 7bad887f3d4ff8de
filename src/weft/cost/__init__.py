"""How long things take on a described cluster. Nothing is edited here and no device is probed."""
