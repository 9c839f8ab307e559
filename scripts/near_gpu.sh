#!/bin/bash
# Run a command on the cores next to the NVIDIA GPU that has this rank's local number.
#   srun ... bash near_gpu.sh COMMAND ...
# The kernel lists the cores of each PCI device in sysfs. Without a GPU, or if the job may not use
# these cores, the command runs on the cores that the launcher has chosen.
set -euo pipefail
number=${SLURM_LOCALID:-${LOCAL_RANK:-0}}
address=$(nvidia-smi --id="$number" --query-gpu=pci.bus_id --format=csv,noheader 2> /dev/null) || address=
address=${address,,} # 00000000:07:00.0 for the device 0000:07:00.0
cores=$(cat "/sys/bus/pci/devices/${address:4}/local_cpulist" 2> /dev/null) || cores=
if [ -n "$cores" ]; then
  taskset --cpu-list --pid "$cores" $$ > /dev/null 2>&1 || true
fi
exec "$@"
