"""The Python interface, whose names `import specbatch` has."""
