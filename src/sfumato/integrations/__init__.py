"""Seats in other frameworks: their training loops, our sketches, secure sums and accounts.

rounds    what a round of updates is, with no framework in it
flower    a mod for clients and a wrapper for strategies; needs `pip install "sfumato[flower]"`
pfl       a postprocessor; needs pfl-research
"""
