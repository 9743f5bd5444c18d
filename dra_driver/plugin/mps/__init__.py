"""Watches MPS while claims use it: who is not served, who bypasses it, whose pods are about to
end.
"""
