"""What hatchling calls, and the project as hatchling sees it."""
