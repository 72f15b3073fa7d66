"""Which items of an open domain are common? Paper 001's algorithms 1 to 3, as they are printed: a
majority of lists of threshold samples, and a count sketch beside them, without privacy of their
own."""
