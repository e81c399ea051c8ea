"""Real servers for the tests, each started once, on free ports, in temp folders. No default instance is touched."""
