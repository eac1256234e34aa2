"""Decision which harvest machines to keep, to ask for and to give back."""
