# NCCL and RCCL over HPE's Slingshot network, sourced by the *_env.sh of sites that have it.
# Sources: HPE = github.com/HewlettPackard/shs-ccl-docs, the guides for NCCL and RCCL and ccl_env.sh,
# read 2026-11-26 (they name Slingshot host software 13.0 and aws-ofi-nccl 1.19 and 1.21);
# OLCF = docs.olcf.ornl.gov, "PyTorch on Frontier", state of 2026-07-22 (ROCm 7.1.1).
# A site's file sets values of its own before it sources this file; they stay.
# shellcheck shell=bash

# Slingshot's NICs. NCCL must not use a management interface (HPE, OLCF).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}"
# The same for gloo, which accepts one interface.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-hsn0}"
# Let a ring use different NICs on different nodes, which is faster on large systems (HPE, OLCF).
export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-1}"
# How libfabric notices that registered memory was freed. userfaultfd and kdreg2 are safe; memhooks
# can deadlock (HPE, OLCF).
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"
# Do not register the host's buffers with the GPU driver: its allocation calls may deadlock (HPE).
export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER:-1}"
# Longer completion and send queues, which large jobs need (HPE, OLCF).
export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE:-131072}"
export FI_CXI_DEFAULT_TX_SIZE="${FI_CXI_DEFAULT_TX_SIZE:-2048}"
# Match messages in hardware, and in software once its lists are full, instead of failing (HPE, OLCF).
export FI_CXI_RX_MATCH_MODE="${FI_CXI_RX_MATCH_MODE:-hybrid}"
# End with an error if the libfabric plugin cannot be used, instead of falling back to TCP. Not on one
# node, where the plugin does not start (OLCF) and where the network should not be used (HPE). Plugins
# up to 1.11 know only the name "AWS Libfabric"; later ones also "Libfabric" and "OFI"
# (aws/aws-ofi-nccl#530, 2024-08).
if [ "${SLURM_JOB_NUM_NODES:-2}" != 1 ]; then
  export NCCL_NET="${NCCL_NET:-AWS Libfabric}"
fi
