"""A build, from settings to files: jobs, what is known from earlier ones, the report."""
