"""The paper's table on downstream tasks, on small models of our own."""
