"""Which items of an open domain do many devices hold, if the collector may see them? Items are
counted exactly, and only names that pass a private threshold are released."""
