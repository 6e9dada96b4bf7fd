"""The course model written out slowly and obviously: what tests and benchmarks hold the library to.

Nothing here imports a layer of `glm_course`: only its sizes (`ModelConfig`) and reserved ids.
"""
