"""How common is each of these items, when nobody is trusted?"""
