"""formats: quantised weights as others store them, one file per family. Everything else sees dense tensors."""
