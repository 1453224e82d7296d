# One recipe a command; `make help` lists them. The Python that runs is chosen, and set up where needed, by .ci/python.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu generate generate-all check-generated golden explain standalone from-module compile-all package verify bench kernelbench rekey report evidence evidence-peers sweep tune sanitize clean

WORKERS ?= 2
# $(call python,emit|run|test|bench) starts a recipe: the interpreter that has what the command needs, or its set-up's error.
python = @py="$$(./.ci/python $(1))" && "$$py"
# $(call fsk,emit|run|bench) starts a recipe that is a command of fsk, installed or not.
fsk = $(call python,$(1)) -m fixed_shape_kernels
# The same for a command whose cases several ranks share: TORCHRUN has torchrun's options, such as "--nnodes 2 --nproc-per-node 8 ...".
fleet = $(call python,run) $(if $(TORCHRUN),-m torch.distributed.run $(TORCHRUN)) -m fixed_shape_kernels
specs = $(if $(SPEC),"$(SPEC)") $(SPECS)
need-spec = @test -n '$(strip $(SPEC)$(SPECS))' || { echo "make $@ needs a spec: make $@ SPEC=specs/default.yaml (shipped: $$(cd codegen && echo specs/*.yaml))" >&2; exit 2; }
prepack = $(if $(filter-out 0,$(PREPACK)),--prepack)
algebra = $(if $(filter 0,$(ALGEBRA)),--no-algebra)
plan-options = $(if $(PRECISION),--precision $(PRECISION)) $(prepack) $(algebra) $(foreach t,$(TARGETS),--target $(t)) $(if $(DEVICE),--device-class $(DEVICE))
write-options = $(if $(OUT),--out "$(OUT)") $(if $(filter-out 0,$(DEBUG)),--debug) $(if $(filter-out 0,$(FORCE)),--force)

help: ## this list
	@echo "Specialised GPU kernels for fixed shapes, from a YAML spec."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Each is a command of fsk (pip install .; or python -m fixed_shape_kernels), whose --help has more options."
	@echo "Variables: SPEC or SPECS (a list), PRECISION=fp32|tf32|fp16|bf16, PREPACK=1, ALGEBRA=0, TARGETS=\"cpu sm_80 sm_90a\", DEVICE=h100|a100|..., OUT=generated, DEBUG=1, FORCE=1, PYTHON=python3; for evidence, tune and sweep TORCHRUN=\"--nproc-per-node 8\""

demo: ## generate specs/default.yaml, build it, run it beside PyTorch
	$(call fsk,run) demo $(if $(SPEC),"$(SPEC)") $(plan-options) $(if $(OUT),--out "$(OUT)")

# Worksteal: an idle worker takes tests that another has not begun, so that one long file does not keep the others waiting.
test: ## generator, runtime, cpu numbers, one CUDA source of each template: minutes on two cores, no GPU
	$(call python,test) -m pytest -m "not (gpu or nvcc or emulated or slow)" -n $(WORKERS) --dist worksteal

test-all: ## what `make test` leaves out and needs no GPU: every source compiled, emulations, many processes, properties on many examples
	$(call python,test) -m pytest -m "(nvcc or emulated or slow or hypothesis) and not gpu" --hypothesis-profile many -n $(WORKERS) --dist worksteal

test-gpu: ## the tests marked gpu, on a machine with a GPU
	$(call python,test) -m pytest -m gpu

generate: ## emit the packages of SPEC or SPECS (PRECISION=, PREPACK=1, ALGEBRA=0, TARGETS=, DEVICE=, OUT=, DEBUG=1, FORCE=1)
	$(need-spec)
	$(call fsk,emit) generate $(specs) $(plan-options) $(write-options)

generate-all: ## renew what generated/ holds in git: the exemplars of index.yaml and the source keys of all shipped packages
	$(call python,emit) -m codegen.checked_in

check-generated: ## fail when an exemplar or a source key in generated/ differs from what the specs emit
	$(call python,emit) -m codegen.checked_in --check

golden: ## renew tests/golden.json, the hashes of all that is emitted and explained, and list what changed
	$(call python,test) -m tests.golden

explain: ## print the plan of SPEC: kernels, tiles, memory, floor
	$(need-spec)
	$(call fsk,emit) explain $(specs) $(plan-options) $(if $(filter-out 0,$(DEBUG)),--debug)

standalone: ## also write <package>/standalone.py: one file that imports nothing of ours
	$(need-spec)
	$(call fsk,emit) standalone $(specs) $(plan-options) $(write-options)

package: ## a wheel of SPEC that needs only torch: no compiler, no runtime (TARGETS="sm_80 cpu", PRECISION=, PREPACK=1, VERSION=, OUT=dist)
	$(need-spec)
	$(call fsk,run) package $(specs) $(plan-options) $(if $(OUT),--out "$(OUT)") $(if $(VERSION),--version "$(VERSION)")

from-module: ## the spec of a PyTorch file in KernelBench's form, whose code is run (MODULE=path/to/file.py[:Model] or a folder, NAME=, OUT=, PRECISION=, ALGEBRA=0, GENERATE=1, FORCE=1, JOBS=)
	@test -n '$(MODULE)' || { echo "make $@ needs a file or a folder: make $@ MODULE=path/to/file.py[:Model]" >&2; exit 2; }
	$(call fsk,run) from-module "$(MODULE)" $(if $(NAME),--name $(NAME)) $(if $(OUT),--out "$(OUT)") $(if $(PRECISION),--precision $(PRECISION)) \
		$(algebra) $(if $(filter-out 0,$(GENERATE)),--generate) $(if $(filter-out 0,$(FORCE)),--force) $(if $(JOBS),--jobs $(JOBS))

compile-all: ## compile the full matrix of shapes, precisions and targets with nvcc (minutes)
	$(call python,test) -m tests.compile_matrix

bench-options = $(if $(PRECISION),--precision $(PRECISION)) $(if $(TARGETS),--target "$(strip $(TARGETS))") $(if $(ON),--device $(ON))

verify: ## is SPEC's model right? against float64 and PyTorch, on ordinary and adversarial data (PRECISION=, PREPACK=1, ALGEBRA=0, TARGETS= one, ON=cpu|cuda)
	$(need-spec)
	$(call fsk,run) verify $(specs) $(bench-options) $(prepack) $(algebra)

bench: ## time SPEC's model beside PyTorch and other peers (BACKWARD=1: forward and backward; PEERS=evidence|autotuned|all or names, PRECISION=, PREPACK=1, ALGEBRA=0, TARGETS= one, ON=)
	$(need-spec)
	$(call fsk,run) bench $(specs) $(bench-options) $(prepack) $(algebra) $(if $(filter-out 0,$(BACKWARD)),--backward) $(if $(PEERS),--peers "$(PEERS)")

evidence: ## verify and time every shipped package on this card; writes bench/results/<gpu>/ (PREPACK=1, BUDGET= seconds; run again to go on)
	$(fleet) evidence $(specs) $(bench-options) $(prepack) $(if $(BUDGET),--budget-s $(BUDGET))

evidence-peers: ## the same with the autotuned peers, minutes a package (PEERS_CACHE= folder for Inductor's cache)
	$(fleet) evidence --autotuned $(specs) $(bench-options) $(if $(BUDGET),--budget-s $(BUDGET))

tune: ## measure the planner's candidates for SPEC on this card and record them in codegen/tuned/ (PRECISION=, DEVICE=, BUDGET= seconds)
	$(need-spec)
	$(fleet) tune $(specs) $(if $(PRECISION),--precision $(PRECISION)) $(if $(DEVICE),--device-class $(DEVICE)) \
		$(if $(ON),--device $(ON)) $(if $(BUDGET),--budget-s $(BUDGET))

sweep: ## COUNT=100 random specs (SEED=0, SMALL=1 for a CPU): right? how fast beside PyTorch? (BUDGET= seconds; run again to go on)
	$(fleet) sweep $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(filter-out 0,$(SMALL)),--small) \
		$(if $(ON),--device $(ON)) $(foreach t,$(TARGETS),--target $(t)) $(if $(BUDGET),--budget-s $(BUDGET))

kernelbench: ## KernelBench's harness over our files (CHECKOUT=path; LEVEL=2: all problems of the level, also verified and timed by us; HARNESS=0: that alone; ALGEBRA=0: chains as written; PROBLEM=, PRECISION=, BUDGET= seconds)
	$(call fsk,run) kernelbench $(if $(LEVEL),--level $(LEVEL)) $(if $(CHECKOUT),--checkout "$(CHECKOUT)") $(if $(filter 0,$(HARNESS)),--no-harness) $(algebra) $(foreach p,$(PROBLEM),--problem $(p)) \
		$(foreach p,$(PRECISION),--precision $(p)) $(if $(ON),--device $(ON)) $(if $(BUDGET),--budget-s $(BUDGET))

rekey: ## give records today's keys where the machine code is that of the commit FROM= (FROM=HEAD~1)
	@test -n '$(FROM)' || { echo "make $@ needs the commit that the records hold for: make $@ FROM=HEAD~1" >&2; exit 2; }
	$(call fsk,bench) rekey --from $(FROM)

report: ## from bench/results: build/report/index.html with pictures, docs/results.md, docs/level2.md, the README's table, the figures of docs/kernels.md
	$(call fsk,bench) report

sanitize: ## compute-sanitizer's four tools over SPEC's kernels (all shipped packages without SPEC) at small shapes
	$(call fsk,run) sanitize $(specs) $(if $(PRECISION),--precision $(PRECISION)) $(foreach t,$(TARGETS),--target $(t))

clean: ## remove what these commands made (.venv, build/, packages of your own under generated/)
	@rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then git clean -fdXq generated; fi
