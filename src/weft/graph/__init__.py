"""Reading and editing FX graphs: one vocabulary, one dependency model, one writer, one text form."""
