"""One file per pass: file = class = CLI name = golden file = doc page."""
