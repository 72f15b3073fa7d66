"""Sfumato in other frameworks: their training loops, our sketches, secure sums and accounts.

rounds    rounds of updates, independent of any framework
flower    a mod for clients and a wrapper for strategies; needs `pip install "sfumato[flower]"`
pfl       a postprocessor; needs pfl-research
"""
