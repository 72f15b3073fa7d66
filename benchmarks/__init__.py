"""How fast and how accurate sfumato is, against its peers and against the limits; see README.md."""
