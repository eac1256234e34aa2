"""Files for those who run Ebbtide beside other software, and the code that writes them."""
