"""The version of the program, read by packaging and by commits."""

VERSION = "0.1.0"
