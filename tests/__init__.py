"""What must hold, and the small models it is held against."""
