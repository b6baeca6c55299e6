"""shoal doctor: measure hosts and what lies between them, judge each fact in one line, and say the fix.

Nothing is imported here: the agent on each host starts with what it needs alone.
"""
