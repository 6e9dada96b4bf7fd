"""`python -m glm_course <command>`."""

from glm_course.cli import main

main()
