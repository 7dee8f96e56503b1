"""The attention side: route, pack, put, wait, combine; and its links to the expert servers."""
