"""The live page of runs: a server on loopback that reads what they write, and the page that shows it."""
