"""The dashboard in a real browser: headless Chromium, a real manager and real host agents."""
