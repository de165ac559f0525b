"""Selectors: which committed tokens verification reads (METHOD section 3). Policy only; arrays stay opaque."""
