"""One self-contained page of results: `page.write` for a report, `differences.write` for two files compared."""
