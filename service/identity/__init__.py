"""Identity providers: discovery, keys, the code exchange and the check of ID tokens.

Imports model, and the options' check of URLs. Knows neither the database nor the pages.
"""
