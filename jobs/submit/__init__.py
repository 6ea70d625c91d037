"""A checked conf to a plan, scripts and a job: `submit.submit`, in an order that loses no job."""
