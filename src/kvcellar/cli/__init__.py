"""cli: one file per verb. Words in, words out; everything else is somebody else's work."""
