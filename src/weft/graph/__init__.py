"""Reading and editing FX graphs: one vocabulary, one dependency model, one way to edit, one text form."""
