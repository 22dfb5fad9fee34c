"""Other programs' doors: a plugin for each, imported by that program alone."""
