"""Starting the workers of a run, here and on other hosts, and how they find one another."""
