"""Which waiting action starts now, and on which cores?"""
