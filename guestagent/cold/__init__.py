"""Pages of the guest that can go without harm, made free: how fast (`pace`), and where from (`pages`)."""
