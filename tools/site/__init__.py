"""The documentation site: pages made from the code, figures from the benchmarks' results."""
