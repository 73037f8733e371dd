"""From result files to one page: comparison of methods, tables, pictures, published numbers, HTML, Markdown and CSV."""
